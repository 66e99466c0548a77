"""SGLang's own server as a supervised service: started with the recipe's flags, guarded, and ended without orphans."""
