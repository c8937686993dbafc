"""Training: fine-tuning beside inference on one device, and elastic training on nodes that can be taken away."""
