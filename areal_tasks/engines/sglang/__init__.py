"""SGLang's server as a supervised service: started with the recipe's flags, behind a token, ended without orphans."""
