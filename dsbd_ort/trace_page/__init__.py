"""A request's trace as a page that explains itself, or as JSON."""
