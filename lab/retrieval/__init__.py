"""Wide beams under a trie, with a separate process for each setting."""
