"""The parameter server: coordinator, shards, learners, and the memory they share."""
