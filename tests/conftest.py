"""What every test shares: property tests are judged by what they find, never by how long a busy machine takes."""

from hypothesis import settings

settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")
