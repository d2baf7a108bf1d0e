"""A page about runs: read what they left, compute what it means, show it in one file."""
