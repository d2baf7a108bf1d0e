"""PyTorch's own tests of torch.distributed, run with Gloo and with offbeat, and the two lists compared."""
