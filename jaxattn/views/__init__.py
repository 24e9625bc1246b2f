"""Numbers to pictures and pages."""
