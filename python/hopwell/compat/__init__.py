"""Entry points of other projects: their callers and tests run on Hopwell unchanged."""
