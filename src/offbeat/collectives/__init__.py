"""Schedules run for real: the torch.distributed backend `offbeat`."""
