"""What communication costs in a user's own training script, which trains as without it."""
