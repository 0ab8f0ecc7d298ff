"""From measured results to JSON, figures and one HTML file."""
