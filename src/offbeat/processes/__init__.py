"""Starting, watching and ending processes; signals; slowness on purpose. Nothing here knows policies or gradients."""
