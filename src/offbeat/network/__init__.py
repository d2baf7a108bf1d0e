"""TCP between processes on different hosts: addresses, connections, streams. It knows no tensors and no schedules."""
