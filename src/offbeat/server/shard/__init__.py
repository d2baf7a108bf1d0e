"""A shard: one part of the parameters, its optimizer, and the process that applies updates to it."""
