"""Contracts and fakes for authors of backends, workloads and optimisers."""
