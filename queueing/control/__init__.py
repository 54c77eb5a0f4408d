"""Assessments of a live window, and wait estimates."""
