"""A small language model with DeepSeek-V4's hybrid attention, beside a model of window attention alone."""
