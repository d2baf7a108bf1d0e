"""The commands of `offbeat`, one file each. Each is loaded when it is called, so that all start quickly."""
