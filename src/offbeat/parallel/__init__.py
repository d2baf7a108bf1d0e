"""A model on several processes: stages of a pipeline."""
