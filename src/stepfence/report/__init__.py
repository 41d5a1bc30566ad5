"""Reports for people, made of what a run left on disk."""
