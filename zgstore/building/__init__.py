"""From a recipe to a snapshot: run the teacher where something is missing, and store what it says."""
