"""Fine-tuning beside inference: who may use the device when, and what that costs."""
