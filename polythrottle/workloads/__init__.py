"""Workloads: Python callables, torch modules, ONNX files, commands."""
