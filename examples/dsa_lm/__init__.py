"""A small language model with DeepSeek Sparse Attention: its text, its network, its training and its report."""
