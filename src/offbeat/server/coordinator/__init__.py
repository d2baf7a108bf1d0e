"""The coordinator: which learners there are, what the policy decides, and which updates are under way."""
