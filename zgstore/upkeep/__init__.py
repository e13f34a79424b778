"""A store examined, collected, compared, carried and repaired."""
