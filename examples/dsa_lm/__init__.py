"""A small language model with DeepSeek Sparse Attention: text, network, training and report."""
