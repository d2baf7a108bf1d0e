"""What a run leaves behind: its folder, its log, and the numbers that are read from them."""
