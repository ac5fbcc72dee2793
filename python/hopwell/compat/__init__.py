"""The entry points of other projects, so that their callers and tests run on Hopwell unchanged."""
