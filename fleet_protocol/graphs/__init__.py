"""Checks graphs before they run: reads them within bounds, compares them with the exporter's."""
