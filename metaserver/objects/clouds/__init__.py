"""Object stores of Azure and Google Cloud through obstore, their shared code, and temporary keys for clients."""
