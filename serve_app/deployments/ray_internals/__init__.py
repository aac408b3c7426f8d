"""Adaptations of Ray and HAProxy that use private details of the pinned release of Ray."""
