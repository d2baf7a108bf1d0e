"""Starting, watching and ending processes; signals; slowness on purpose."""
