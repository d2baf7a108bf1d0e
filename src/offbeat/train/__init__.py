"""Training by recipe: what `offbeat train` does, and what a program of one's own can do in a few lines."""
