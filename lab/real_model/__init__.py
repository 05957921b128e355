"""A real chat model, from the package registry to tables beside other tools."""
