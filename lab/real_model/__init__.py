"""A real chat model, from its download to a comparison with other tools."""
