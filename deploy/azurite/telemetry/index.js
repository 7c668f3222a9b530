// Azurite loads this package to send telemetry to its maker, which the tests disable. The real package has 230 MB.
module.exports = {};
