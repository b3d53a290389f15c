//! Join tokens as people paste them.

#![no_main]

use libfuzzer_sys::fuzz_target;
use shimmer_node::token::Token;

fuzz_target!(|text: &str| {
    if let Ok(token) = Token::decode(text) {
        let again = Token::decode(&token.encode());
        assert_eq!(again.map(|t| t.ca_fingerprint()), Ok(token.ca_fingerprint()));
    }
});
