"""Wide beams under a trie, each setting in a process of its own."""
