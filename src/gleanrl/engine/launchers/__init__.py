"""Ways to have nodes started: a launcher gets invitations, and each ends as a node that joins."""
