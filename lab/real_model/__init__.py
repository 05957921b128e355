"""A real chat model, from the package registry to tables with other tools."""
