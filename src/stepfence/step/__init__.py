"""One attempt at a step: script, sentinels, fence, classification."""
