"""`cudnn.csa`: DeepSeek-V4's compressor, for callers that import it from there."""
