"""Pictures: files and images to pixels by Pillow, and to the rows of prompts."""
