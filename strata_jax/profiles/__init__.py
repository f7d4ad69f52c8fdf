"""Machine and model profiles as JSON: every number says where it comes from."""
