"""LoRA adapters: files, memory of the host and of the device, and their part of a step."""
