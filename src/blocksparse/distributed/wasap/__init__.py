"""WASAP-SGD and WASSP-SGD: one sparse network trained by several processes, then averaged."""
