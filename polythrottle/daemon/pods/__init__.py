"""Kubernetes pods as services: which pod has which GPUs, what its annotations ask for, and when it is gone."""
