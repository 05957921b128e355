"""Given rows: nodes of a prompt whose embeddings are an encoder's."""
