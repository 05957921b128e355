"""Sources: inputs of an encoder, and the slots that their outputs take."""
