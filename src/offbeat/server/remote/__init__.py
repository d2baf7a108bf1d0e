"""Learners on other hosts: the road over TCP between a learner there and the servers' memory here."""
