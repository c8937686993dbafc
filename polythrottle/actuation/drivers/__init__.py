"""The ways to reach a control: files of the kernel, NVML, and nvpmodel."""
