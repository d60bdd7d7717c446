"""Measurements in print: profiles, fits and diagnoses come in, tables and objects go out."""
