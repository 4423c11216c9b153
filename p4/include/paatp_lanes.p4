/* Made from paatp-common by `cargo xtask codegen`. */

/* The lanes of all slots. The first payload is stored; to others the slot's lanes are added, in both. */
control PaatpLanes(inout headers_t hdr, in bit<32> slot, in bool is_first) {
#if PAATP_BLOCKS > 0
    register<bit<64>>(PAATP_SLOTS) lanes_0_0;
    register<bit<64>>(PAATP_SLOTS) lanes_0_1;
    register<bit<64>>(PAATP_SLOTS) lanes_0_2;
    register<bit<64>>(PAATP_SLOTS) lanes_0_3;
    register<bit<64>>(PAATP_SLOTS) lanes_0_4;
    register<bit<64>>(PAATP_SLOTS) lanes_0_5;
    register<bit<64>>(PAATP_SLOTS) lanes_0_6;
    register<bit<64>>(PAATP_SLOTS) lanes_0_7;
    register<bit<64>>(PAATP_SLOTS) lanes_0_8;
    register<bit<64>>(PAATP_SLOTS) lanes_0_9;
    register<bit<64>>(PAATP_SLOTS) lanes_0_10;
    register<bit<64>>(PAATP_SLOTS) lanes_0_11;
    register<bit<64>>(PAATP_SLOTS) lanes_0_12;
    register<bit<64>>(PAATP_SLOTS) lanes_0_13;
    register<bit<64>>(PAATP_SLOTS) lanes_0_14;
    register<bit<64>>(PAATP_SLOTS) lanes_0_15;
#endif
#if PAATP_BLOCKS > 1
    register<bit<64>>(PAATP_SLOTS) lanes_1_0;
    register<bit<64>>(PAATP_SLOTS) lanes_1_1;
    register<bit<64>>(PAATP_SLOTS) lanes_1_2;
    register<bit<64>>(PAATP_SLOTS) lanes_1_3;
    register<bit<64>>(PAATP_SLOTS) lanes_1_4;
    register<bit<64>>(PAATP_SLOTS) lanes_1_5;
    register<bit<64>>(PAATP_SLOTS) lanes_1_6;
    register<bit<64>>(PAATP_SLOTS) lanes_1_7;
    register<bit<64>>(PAATP_SLOTS) lanes_1_8;
    register<bit<64>>(PAATP_SLOTS) lanes_1_9;
    register<bit<64>>(PAATP_SLOTS) lanes_1_10;
    register<bit<64>>(PAATP_SLOTS) lanes_1_11;
    register<bit<64>>(PAATP_SLOTS) lanes_1_12;
    register<bit<64>>(PAATP_SLOTS) lanes_1_13;
    register<bit<64>>(PAATP_SLOTS) lanes_1_14;
    register<bit<64>>(PAATP_SLOTS) lanes_1_15;
#endif
#if PAATP_BLOCKS > 2
    register<bit<64>>(PAATP_SLOTS) lanes_2_0;
    register<bit<64>>(PAATP_SLOTS) lanes_2_1;
    register<bit<64>>(PAATP_SLOTS) lanes_2_2;
    register<bit<64>>(PAATP_SLOTS) lanes_2_3;
    register<bit<64>>(PAATP_SLOTS) lanes_2_4;
    register<bit<64>>(PAATP_SLOTS) lanes_2_5;
    register<bit<64>>(PAATP_SLOTS) lanes_2_6;
    register<bit<64>>(PAATP_SLOTS) lanes_2_7;
    register<bit<64>>(PAATP_SLOTS) lanes_2_8;
    register<bit<64>>(PAATP_SLOTS) lanes_2_9;
    register<bit<64>>(PAATP_SLOTS) lanes_2_10;
    register<bit<64>>(PAATP_SLOTS) lanes_2_11;
    register<bit<64>>(PAATP_SLOTS) lanes_2_12;
    register<bit<64>>(PAATP_SLOTS) lanes_2_13;
    register<bit<64>>(PAATP_SLOTS) lanes_2_14;
    register<bit<64>>(PAATP_SLOTS) lanes_2_15;
#endif
#if PAATP_BLOCKS > 3
    register<bit<64>>(PAATP_SLOTS) lanes_3_0;
    register<bit<64>>(PAATP_SLOTS) lanes_3_1;
    register<bit<64>>(PAATP_SLOTS) lanes_3_2;
    register<bit<64>>(PAATP_SLOTS) lanes_3_3;
    register<bit<64>>(PAATP_SLOTS) lanes_3_4;
    register<bit<64>>(PAATP_SLOTS) lanes_3_5;
    register<bit<64>>(PAATP_SLOTS) lanes_3_6;
    register<bit<64>>(PAATP_SLOTS) lanes_3_7;
    register<bit<64>>(PAATP_SLOTS) lanes_3_8;
    register<bit<64>>(PAATP_SLOTS) lanes_3_9;
    register<bit<64>>(PAATP_SLOTS) lanes_3_10;
    register<bit<64>>(PAATP_SLOTS) lanes_3_11;
    register<bit<64>>(PAATP_SLOTS) lanes_3_12;
    register<bit<64>>(PAATP_SLOTS) lanes_3_13;
    register<bit<64>>(PAATP_SLOTS) lanes_3_14;
    register<bit<64>>(PAATP_SLOTS) lanes_3_15;
#endif
#if PAATP_BLOCKS > 4
    register<bit<64>>(PAATP_SLOTS) lanes_4_0;
    register<bit<64>>(PAATP_SLOTS) lanes_4_1;
    register<bit<64>>(PAATP_SLOTS) lanes_4_2;
    register<bit<64>>(PAATP_SLOTS) lanes_4_3;
    register<bit<64>>(PAATP_SLOTS) lanes_4_4;
    register<bit<64>>(PAATP_SLOTS) lanes_4_5;
    register<bit<64>>(PAATP_SLOTS) lanes_4_6;
    register<bit<64>>(PAATP_SLOTS) lanes_4_7;
    register<bit<64>>(PAATP_SLOTS) lanes_4_8;
    register<bit<64>>(PAATP_SLOTS) lanes_4_9;
    register<bit<64>>(PAATP_SLOTS) lanes_4_10;
    register<bit<64>>(PAATP_SLOTS) lanes_4_11;
    register<bit<64>>(PAATP_SLOTS) lanes_4_12;
    register<bit<64>>(PAATP_SLOTS) lanes_4_13;
    register<bit<64>>(PAATP_SLOTS) lanes_4_14;
    register<bit<64>>(PAATP_SLOTS) lanes_4_15;
#endif
#if PAATP_BLOCKS > 5
    register<bit<64>>(PAATP_SLOTS) lanes_5_0;
    register<bit<64>>(PAATP_SLOTS) lanes_5_1;
    register<bit<64>>(PAATP_SLOTS) lanes_5_2;
    register<bit<64>>(PAATP_SLOTS) lanes_5_3;
    register<bit<64>>(PAATP_SLOTS) lanes_5_4;
    register<bit<64>>(PAATP_SLOTS) lanes_5_5;
    register<bit<64>>(PAATP_SLOTS) lanes_5_6;
    register<bit<64>>(PAATP_SLOTS) lanes_5_7;
    register<bit<64>>(PAATP_SLOTS) lanes_5_8;
    register<bit<64>>(PAATP_SLOTS) lanes_5_9;
    register<bit<64>>(PAATP_SLOTS) lanes_5_10;
    register<bit<64>>(PAATP_SLOTS) lanes_5_11;
    register<bit<64>>(PAATP_SLOTS) lanes_5_12;
    register<bit<64>>(PAATP_SLOTS) lanes_5_13;
    register<bit<64>>(PAATP_SLOTS) lanes_5_14;
    register<bit<64>>(PAATP_SLOTS) lanes_5_15;
#endif
#if PAATP_BLOCKS > 6
    register<bit<64>>(PAATP_SLOTS) lanes_6_0;
    register<bit<64>>(PAATP_SLOTS) lanes_6_1;
    register<bit<64>>(PAATP_SLOTS) lanes_6_2;
    register<bit<64>>(PAATP_SLOTS) lanes_6_3;
    register<bit<64>>(PAATP_SLOTS) lanes_6_4;
    register<bit<64>>(PAATP_SLOTS) lanes_6_5;
    register<bit<64>>(PAATP_SLOTS) lanes_6_6;
    register<bit<64>>(PAATP_SLOTS) lanes_6_7;
    register<bit<64>>(PAATP_SLOTS) lanes_6_8;
    register<bit<64>>(PAATP_SLOTS) lanes_6_9;
    register<bit<64>>(PAATP_SLOTS) lanes_6_10;
    register<bit<64>>(PAATP_SLOTS) lanes_6_11;
    register<bit<64>>(PAATP_SLOTS) lanes_6_12;
    register<bit<64>>(PAATP_SLOTS) lanes_6_13;
    register<bit<64>>(PAATP_SLOTS) lanes_6_14;
    register<bit<64>>(PAATP_SLOTS) lanes_6_15;
#endif
#if PAATP_BLOCKS > 7
    register<bit<64>>(PAATP_SLOTS) lanes_7_0;
    register<bit<64>>(PAATP_SLOTS) lanes_7_1;
    register<bit<64>>(PAATP_SLOTS) lanes_7_2;
    register<bit<64>>(PAATP_SLOTS) lanes_7_3;
    register<bit<64>>(PAATP_SLOTS) lanes_7_4;
    register<bit<64>>(PAATP_SLOTS) lanes_7_5;
    register<bit<64>>(PAATP_SLOTS) lanes_7_6;
    register<bit<64>>(PAATP_SLOTS) lanes_7_7;
    register<bit<64>>(PAATP_SLOTS) lanes_7_8;
    register<bit<64>>(PAATP_SLOTS) lanes_7_9;
    register<bit<64>>(PAATP_SLOTS) lanes_7_10;
    register<bit<64>>(PAATP_SLOTS) lanes_7_11;
    register<bit<64>>(PAATP_SLOTS) lanes_7_12;
    register<bit<64>>(PAATP_SLOTS) lanes_7_13;
    register<bit<64>>(PAATP_SLOTS) lanes_7_14;
    register<bit<64>>(PAATP_SLOTS) lanes_7_15;
#endif

    apply {
        bit<64> sum;
#if PAATP_BLOCKS > 0
        if (hdr.block[0].isValid()) {
            if (!is_first) {
                lanes_0_0.read(sum, slot);
                hdr.block[0].word0 = hdr.block[0].word0 + sum;
                lanes_0_1.read(sum, slot);
                hdr.block[0].word1 = hdr.block[0].word1 + sum;
                lanes_0_2.read(sum, slot);
                hdr.block[0].word2 = hdr.block[0].word2 + sum;
                lanes_0_3.read(sum, slot);
                hdr.block[0].word3 = hdr.block[0].word3 + sum;
                lanes_0_4.read(sum, slot);
                hdr.block[0].word4 = hdr.block[0].word4 + sum;
                lanes_0_5.read(sum, slot);
                hdr.block[0].word5 = hdr.block[0].word5 + sum;
                lanes_0_6.read(sum, slot);
                hdr.block[0].word6 = hdr.block[0].word6 + sum;
                lanes_0_7.read(sum, slot);
                hdr.block[0].word7 = hdr.block[0].word7 + sum;
                lanes_0_8.read(sum, slot);
                hdr.block[0].word8 = hdr.block[0].word8 + sum;
                lanes_0_9.read(sum, slot);
                hdr.block[0].word9 = hdr.block[0].word9 + sum;
                lanes_0_10.read(sum, slot);
                hdr.block[0].word10 = hdr.block[0].word10 + sum;
                lanes_0_11.read(sum, slot);
                hdr.block[0].word11 = hdr.block[0].word11 + sum;
                lanes_0_12.read(sum, slot);
                hdr.block[0].word12 = hdr.block[0].word12 + sum;
                lanes_0_13.read(sum, slot);
                hdr.block[0].word13 = hdr.block[0].word13 + sum;
                lanes_0_14.read(sum, slot);
                hdr.block[0].word14 = hdr.block[0].word14 + sum;
                lanes_0_15.read(sum, slot);
                hdr.block[0].word15 = hdr.block[0].word15 + sum;
            }
            lanes_0_0.write(slot, hdr.block[0].word0);
            lanes_0_1.write(slot, hdr.block[0].word1);
            lanes_0_2.write(slot, hdr.block[0].word2);
            lanes_0_3.write(slot, hdr.block[0].word3);
            lanes_0_4.write(slot, hdr.block[0].word4);
            lanes_0_5.write(slot, hdr.block[0].word5);
            lanes_0_6.write(slot, hdr.block[0].word6);
            lanes_0_7.write(slot, hdr.block[0].word7);
            lanes_0_8.write(slot, hdr.block[0].word8);
            lanes_0_9.write(slot, hdr.block[0].word9);
            lanes_0_10.write(slot, hdr.block[0].word10);
            lanes_0_11.write(slot, hdr.block[0].word11);
            lanes_0_12.write(slot, hdr.block[0].word12);
            lanes_0_13.write(slot, hdr.block[0].word13);
            lanes_0_14.write(slot, hdr.block[0].word14);
            lanes_0_15.write(slot, hdr.block[0].word15);
        }
#endif
#if PAATP_BLOCKS > 1
        if (hdr.block[1].isValid()) {
            if (!is_first) {
                lanes_1_0.read(sum, slot);
                hdr.block[1].word0 = hdr.block[1].word0 + sum;
                lanes_1_1.read(sum, slot);
                hdr.block[1].word1 = hdr.block[1].word1 + sum;
                lanes_1_2.read(sum, slot);
                hdr.block[1].word2 = hdr.block[1].word2 + sum;
                lanes_1_3.read(sum, slot);
                hdr.block[1].word3 = hdr.block[1].word3 + sum;
                lanes_1_4.read(sum, slot);
                hdr.block[1].word4 = hdr.block[1].word4 + sum;
                lanes_1_5.read(sum, slot);
                hdr.block[1].word5 = hdr.block[1].word5 + sum;
                lanes_1_6.read(sum, slot);
                hdr.block[1].word6 = hdr.block[1].word6 + sum;
                lanes_1_7.read(sum, slot);
                hdr.block[1].word7 = hdr.block[1].word7 + sum;
                lanes_1_8.read(sum, slot);
                hdr.block[1].word8 = hdr.block[1].word8 + sum;
                lanes_1_9.read(sum, slot);
                hdr.block[1].word9 = hdr.block[1].word9 + sum;
                lanes_1_10.read(sum, slot);
                hdr.block[1].word10 = hdr.block[1].word10 + sum;
                lanes_1_11.read(sum, slot);
                hdr.block[1].word11 = hdr.block[1].word11 + sum;
                lanes_1_12.read(sum, slot);
                hdr.block[1].word12 = hdr.block[1].word12 + sum;
                lanes_1_13.read(sum, slot);
                hdr.block[1].word13 = hdr.block[1].word13 + sum;
                lanes_1_14.read(sum, slot);
                hdr.block[1].word14 = hdr.block[1].word14 + sum;
                lanes_1_15.read(sum, slot);
                hdr.block[1].word15 = hdr.block[1].word15 + sum;
            }
            lanes_1_0.write(slot, hdr.block[1].word0);
            lanes_1_1.write(slot, hdr.block[1].word1);
            lanes_1_2.write(slot, hdr.block[1].word2);
            lanes_1_3.write(slot, hdr.block[1].word3);
            lanes_1_4.write(slot, hdr.block[1].word4);
            lanes_1_5.write(slot, hdr.block[1].word5);
            lanes_1_6.write(slot, hdr.block[1].word6);
            lanes_1_7.write(slot, hdr.block[1].word7);
            lanes_1_8.write(slot, hdr.block[1].word8);
            lanes_1_9.write(slot, hdr.block[1].word9);
            lanes_1_10.write(slot, hdr.block[1].word10);
            lanes_1_11.write(slot, hdr.block[1].word11);
            lanes_1_12.write(slot, hdr.block[1].word12);
            lanes_1_13.write(slot, hdr.block[1].word13);
            lanes_1_14.write(slot, hdr.block[1].word14);
            lanes_1_15.write(slot, hdr.block[1].word15);
        }
#endif
#if PAATP_BLOCKS > 2
        if (hdr.block[2].isValid()) {
            if (!is_first) {
                lanes_2_0.read(sum, slot);
                hdr.block[2].word0 = hdr.block[2].word0 + sum;
                lanes_2_1.read(sum, slot);
                hdr.block[2].word1 = hdr.block[2].word1 + sum;
                lanes_2_2.read(sum, slot);
                hdr.block[2].word2 = hdr.block[2].word2 + sum;
                lanes_2_3.read(sum, slot);
                hdr.block[2].word3 = hdr.block[2].word3 + sum;
                lanes_2_4.read(sum, slot);
                hdr.block[2].word4 = hdr.block[2].word4 + sum;
                lanes_2_5.read(sum, slot);
                hdr.block[2].word5 = hdr.block[2].word5 + sum;
                lanes_2_6.read(sum, slot);
                hdr.block[2].word6 = hdr.block[2].word6 + sum;
                lanes_2_7.read(sum, slot);
                hdr.block[2].word7 = hdr.block[2].word7 + sum;
                lanes_2_8.read(sum, slot);
                hdr.block[2].word8 = hdr.block[2].word8 + sum;
                lanes_2_9.read(sum, slot);
                hdr.block[2].word9 = hdr.block[2].word9 + sum;
                lanes_2_10.read(sum, slot);
                hdr.block[2].word10 = hdr.block[2].word10 + sum;
                lanes_2_11.read(sum, slot);
                hdr.block[2].word11 = hdr.block[2].word11 + sum;
                lanes_2_12.read(sum, slot);
                hdr.block[2].word12 = hdr.block[2].word12 + sum;
                lanes_2_13.read(sum, slot);
                hdr.block[2].word13 = hdr.block[2].word13 + sum;
                lanes_2_14.read(sum, slot);
                hdr.block[2].word14 = hdr.block[2].word14 + sum;
                lanes_2_15.read(sum, slot);
                hdr.block[2].word15 = hdr.block[2].word15 + sum;
            }
            lanes_2_0.write(slot, hdr.block[2].word0);
            lanes_2_1.write(slot, hdr.block[2].word1);
            lanes_2_2.write(slot, hdr.block[2].word2);
            lanes_2_3.write(slot, hdr.block[2].word3);
            lanes_2_4.write(slot, hdr.block[2].word4);
            lanes_2_5.write(slot, hdr.block[2].word5);
            lanes_2_6.write(slot, hdr.block[2].word6);
            lanes_2_7.write(slot, hdr.block[2].word7);
            lanes_2_8.write(slot, hdr.block[2].word8);
            lanes_2_9.write(slot, hdr.block[2].word9);
            lanes_2_10.write(slot, hdr.block[2].word10);
            lanes_2_11.write(slot, hdr.block[2].word11);
            lanes_2_12.write(slot, hdr.block[2].word12);
            lanes_2_13.write(slot, hdr.block[2].word13);
            lanes_2_14.write(slot, hdr.block[2].word14);
            lanes_2_15.write(slot, hdr.block[2].word15);
        }
#endif
#if PAATP_BLOCKS > 3
        if (hdr.block[3].isValid()) {
            if (!is_first) {
                lanes_3_0.read(sum, slot);
                hdr.block[3].word0 = hdr.block[3].word0 + sum;
                lanes_3_1.read(sum, slot);
                hdr.block[3].word1 = hdr.block[3].word1 + sum;
                lanes_3_2.read(sum, slot);
                hdr.block[3].word2 = hdr.block[3].word2 + sum;
                lanes_3_3.read(sum, slot);
                hdr.block[3].word3 = hdr.block[3].word3 + sum;
                lanes_3_4.read(sum, slot);
                hdr.block[3].word4 = hdr.block[3].word4 + sum;
                lanes_3_5.read(sum, slot);
                hdr.block[3].word5 = hdr.block[3].word5 + sum;
                lanes_3_6.read(sum, slot);
                hdr.block[3].word6 = hdr.block[3].word6 + sum;
                lanes_3_7.read(sum, slot);
                hdr.block[3].word7 = hdr.block[3].word7 + sum;
                lanes_3_8.read(sum, slot);
                hdr.block[3].word8 = hdr.block[3].word8 + sum;
                lanes_3_9.read(sum, slot);
                hdr.block[3].word9 = hdr.block[3].word9 + sum;
                lanes_3_10.read(sum, slot);
                hdr.block[3].word10 = hdr.block[3].word10 + sum;
                lanes_3_11.read(sum, slot);
                hdr.block[3].word11 = hdr.block[3].word11 + sum;
                lanes_3_12.read(sum, slot);
                hdr.block[3].word12 = hdr.block[3].word12 + sum;
                lanes_3_13.read(sum, slot);
                hdr.block[3].word13 = hdr.block[3].word13 + sum;
                lanes_3_14.read(sum, slot);
                hdr.block[3].word14 = hdr.block[3].word14 + sum;
                lanes_3_15.read(sum, slot);
                hdr.block[3].word15 = hdr.block[3].word15 + sum;
            }
            lanes_3_0.write(slot, hdr.block[3].word0);
            lanes_3_1.write(slot, hdr.block[3].word1);
            lanes_3_2.write(slot, hdr.block[3].word2);
            lanes_3_3.write(slot, hdr.block[3].word3);
            lanes_3_4.write(slot, hdr.block[3].word4);
            lanes_3_5.write(slot, hdr.block[3].word5);
            lanes_3_6.write(slot, hdr.block[3].word6);
            lanes_3_7.write(slot, hdr.block[3].word7);
            lanes_3_8.write(slot, hdr.block[3].word8);
            lanes_3_9.write(slot, hdr.block[3].word9);
            lanes_3_10.write(slot, hdr.block[3].word10);
            lanes_3_11.write(slot, hdr.block[3].word11);
            lanes_3_12.write(slot, hdr.block[3].word12);
            lanes_3_13.write(slot, hdr.block[3].word13);
            lanes_3_14.write(slot, hdr.block[3].word14);
            lanes_3_15.write(slot, hdr.block[3].word15);
        }
#endif
#if PAATP_BLOCKS > 4
        if (hdr.block[4].isValid()) {
            if (!is_first) {
                lanes_4_0.read(sum, slot);
                hdr.block[4].word0 = hdr.block[4].word0 + sum;
                lanes_4_1.read(sum, slot);
                hdr.block[4].word1 = hdr.block[4].word1 + sum;
                lanes_4_2.read(sum, slot);
                hdr.block[4].word2 = hdr.block[4].word2 + sum;
                lanes_4_3.read(sum, slot);
                hdr.block[4].word3 = hdr.block[4].word3 + sum;
                lanes_4_4.read(sum, slot);
                hdr.block[4].word4 = hdr.block[4].word4 + sum;
                lanes_4_5.read(sum, slot);
                hdr.block[4].word5 = hdr.block[4].word5 + sum;
                lanes_4_6.read(sum, slot);
                hdr.block[4].word6 = hdr.block[4].word6 + sum;
                lanes_4_7.read(sum, slot);
                hdr.block[4].word7 = hdr.block[4].word7 + sum;
                lanes_4_8.read(sum, slot);
                hdr.block[4].word8 = hdr.block[4].word8 + sum;
                lanes_4_9.read(sum, slot);
                hdr.block[4].word9 = hdr.block[4].word9 + sum;
                lanes_4_10.read(sum, slot);
                hdr.block[4].word10 = hdr.block[4].word10 + sum;
                lanes_4_11.read(sum, slot);
                hdr.block[4].word11 = hdr.block[4].word11 + sum;
                lanes_4_12.read(sum, slot);
                hdr.block[4].word12 = hdr.block[4].word12 + sum;
                lanes_4_13.read(sum, slot);
                hdr.block[4].word13 = hdr.block[4].word13 + sum;
                lanes_4_14.read(sum, slot);
                hdr.block[4].word14 = hdr.block[4].word14 + sum;
                lanes_4_15.read(sum, slot);
                hdr.block[4].word15 = hdr.block[4].word15 + sum;
            }
            lanes_4_0.write(slot, hdr.block[4].word0);
            lanes_4_1.write(slot, hdr.block[4].word1);
            lanes_4_2.write(slot, hdr.block[4].word2);
            lanes_4_3.write(slot, hdr.block[4].word3);
            lanes_4_4.write(slot, hdr.block[4].word4);
            lanes_4_5.write(slot, hdr.block[4].word5);
            lanes_4_6.write(slot, hdr.block[4].word6);
            lanes_4_7.write(slot, hdr.block[4].word7);
            lanes_4_8.write(slot, hdr.block[4].word8);
            lanes_4_9.write(slot, hdr.block[4].word9);
            lanes_4_10.write(slot, hdr.block[4].word10);
            lanes_4_11.write(slot, hdr.block[4].word11);
            lanes_4_12.write(slot, hdr.block[4].word12);
            lanes_4_13.write(slot, hdr.block[4].word13);
            lanes_4_14.write(slot, hdr.block[4].word14);
            lanes_4_15.write(slot, hdr.block[4].word15);
        }
#endif
#if PAATP_BLOCKS > 5
        if (hdr.block[5].isValid()) {
            if (!is_first) {
                lanes_5_0.read(sum, slot);
                hdr.block[5].word0 = hdr.block[5].word0 + sum;
                lanes_5_1.read(sum, slot);
                hdr.block[5].word1 = hdr.block[5].word1 + sum;
                lanes_5_2.read(sum, slot);
                hdr.block[5].word2 = hdr.block[5].word2 + sum;
                lanes_5_3.read(sum, slot);
                hdr.block[5].word3 = hdr.block[5].word3 + sum;
                lanes_5_4.read(sum, slot);
                hdr.block[5].word4 = hdr.block[5].word4 + sum;
                lanes_5_5.read(sum, slot);
                hdr.block[5].word5 = hdr.block[5].word5 + sum;
                lanes_5_6.read(sum, slot);
                hdr.block[5].word6 = hdr.block[5].word6 + sum;
                lanes_5_7.read(sum, slot);
                hdr.block[5].word7 = hdr.block[5].word7 + sum;
                lanes_5_8.read(sum, slot);
                hdr.block[5].word8 = hdr.block[5].word8 + sum;
                lanes_5_9.read(sum, slot);
                hdr.block[5].word9 = hdr.block[5].word9 + sum;
                lanes_5_10.read(sum, slot);
                hdr.block[5].word10 = hdr.block[5].word10 + sum;
                lanes_5_11.read(sum, slot);
                hdr.block[5].word11 = hdr.block[5].word11 + sum;
                lanes_5_12.read(sum, slot);
                hdr.block[5].word12 = hdr.block[5].word12 + sum;
                lanes_5_13.read(sum, slot);
                hdr.block[5].word13 = hdr.block[5].word13 + sum;
                lanes_5_14.read(sum, slot);
                hdr.block[5].word14 = hdr.block[5].word14 + sum;
                lanes_5_15.read(sum, slot);
                hdr.block[5].word15 = hdr.block[5].word15 + sum;
            }
            lanes_5_0.write(slot, hdr.block[5].word0);
            lanes_5_1.write(slot, hdr.block[5].word1);
            lanes_5_2.write(slot, hdr.block[5].word2);
            lanes_5_3.write(slot, hdr.block[5].word3);
            lanes_5_4.write(slot, hdr.block[5].word4);
            lanes_5_5.write(slot, hdr.block[5].word5);
            lanes_5_6.write(slot, hdr.block[5].word6);
            lanes_5_7.write(slot, hdr.block[5].word7);
            lanes_5_8.write(slot, hdr.block[5].word8);
            lanes_5_9.write(slot, hdr.block[5].word9);
            lanes_5_10.write(slot, hdr.block[5].word10);
            lanes_5_11.write(slot, hdr.block[5].word11);
            lanes_5_12.write(slot, hdr.block[5].word12);
            lanes_5_13.write(slot, hdr.block[5].word13);
            lanes_5_14.write(slot, hdr.block[5].word14);
            lanes_5_15.write(slot, hdr.block[5].word15);
        }
#endif
#if PAATP_BLOCKS > 6
        if (hdr.block[6].isValid()) {
            if (!is_first) {
                lanes_6_0.read(sum, slot);
                hdr.block[6].word0 = hdr.block[6].word0 + sum;
                lanes_6_1.read(sum, slot);
                hdr.block[6].word1 = hdr.block[6].word1 + sum;
                lanes_6_2.read(sum, slot);
                hdr.block[6].word2 = hdr.block[6].word2 + sum;
                lanes_6_3.read(sum, slot);
                hdr.block[6].word3 = hdr.block[6].word3 + sum;
                lanes_6_4.read(sum, slot);
                hdr.block[6].word4 = hdr.block[6].word4 + sum;
                lanes_6_5.read(sum, slot);
                hdr.block[6].word5 = hdr.block[6].word5 + sum;
                lanes_6_6.read(sum, slot);
                hdr.block[6].word6 = hdr.block[6].word6 + sum;
                lanes_6_7.read(sum, slot);
                hdr.block[6].word7 = hdr.block[6].word7 + sum;
                lanes_6_8.read(sum, slot);
                hdr.block[6].word8 = hdr.block[6].word8 + sum;
                lanes_6_9.read(sum, slot);
                hdr.block[6].word9 = hdr.block[6].word9 + sum;
                lanes_6_10.read(sum, slot);
                hdr.block[6].word10 = hdr.block[6].word10 + sum;
                lanes_6_11.read(sum, slot);
                hdr.block[6].word11 = hdr.block[6].word11 + sum;
                lanes_6_12.read(sum, slot);
                hdr.block[6].word12 = hdr.block[6].word12 + sum;
                lanes_6_13.read(sum, slot);
                hdr.block[6].word13 = hdr.block[6].word13 + sum;
                lanes_6_14.read(sum, slot);
                hdr.block[6].word14 = hdr.block[6].word14 + sum;
                lanes_6_15.read(sum, slot);
                hdr.block[6].word15 = hdr.block[6].word15 + sum;
            }
            lanes_6_0.write(slot, hdr.block[6].word0);
            lanes_6_1.write(slot, hdr.block[6].word1);
            lanes_6_2.write(slot, hdr.block[6].word2);
            lanes_6_3.write(slot, hdr.block[6].word3);
            lanes_6_4.write(slot, hdr.block[6].word4);
            lanes_6_5.write(slot, hdr.block[6].word5);
            lanes_6_6.write(slot, hdr.block[6].word6);
            lanes_6_7.write(slot, hdr.block[6].word7);
            lanes_6_8.write(slot, hdr.block[6].word8);
            lanes_6_9.write(slot, hdr.block[6].word9);
            lanes_6_10.write(slot, hdr.block[6].word10);
            lanes_6_11.write(slot, hdr.block[6].word11);
            lanes_6_12.write(slot, hdr.block[6].word12);
            lanes_6_13.write(slot, hdr.block[6].word13);
            lanes_6_14.write(slot, hdr.block[6].word14);
            lanes_6_15.write(slot, hdr.block[6].word15);
        }
#endif
#if PAATP_BLOCKS > 7
        if (hdr.block[7].isValid()) {
            if (!is_first) {
                lanes_7_0.read(sum, slot);
                hdr.block[7].word0 = hdr.block[7].word0 + sum;
                lanes_7_1.read(sum, slot);
                hdr.block[7].word1 = hdr.block[7].word1 + sum;
                lanes_7_2.read(sum, slot);
                hdr.block[7].word2 = hdr.block[7].word2 + sum;
                lanes_7_3.read(sum, slot);
                hdr.block[7].word3 = hdr.block[7].word3 + sum;
                lanes_7_4.read(sum, slot);
                hdr.block[7].word4 = hdr.block[7].word4 + sum;
                lanes_7_5.read(sum, slot);
                hdr.block[7].word5 = hdr.block[7].word5 + sum;
                lanes_7_6.read(sum, slot);
                hdr.block[7].word6 = hdr.block[7].word6 + sum;
                lanes_7_7.read(sum, slot);
                hdr.block[7].word7 = hdr.block[7].word7 + sum;
                lanes_7_8.read(sum, slot);
                hdr.block[7].word8 = hdr.block[7].word8 + sum;
                lanes_7_9.read(sum, slot);
                hdr.block[7].word9 = hdr.block[7].word9 + sum;
                lanes_7_10.read(sum, slot);
                hdr.block[7].word10 = hdr.block[7].word10 + sum;
                lanes_7_11.read(sum, slot);
                hdr.block[7].word11 = hdr.block[7].word11 + sum;
                lanes_7_12.read(sum, slot);
                hdr.block[7].word12 = hdr.block[7].word12 + sum;
                lanes_7_13.read(sum, slot);
                hdr.block[7].word13 = hdr.block[7].word13 + sum;
                lanes_7_14.read(sum, slot);
                hdr.block[7].word14 = hdr.block[7].word14 + sum;
                lanes_7_15.read(sum, slot);
                hdr.block[7].word15 = hdr.block[7].word15 + sum;
            }
            lanes_7_0.write(slot, hdr.block[7].word0);
            lanes_7_1.write(slot, hdr.block[7].word1);
            lanes_7_2.write(slot, hdr.block[7].word2);
            lanes_7_3.write(slot, hdr.block[7].word3);
            lanes_7_4.write(slot, hdr.block[7].word4);
            lanes_7_5.write(slot, hdr.block[7].word5);
            lanes_7_6.write(slot, hdr.block[7].word6);
            lanes_7_7.write(slot, hdr.block[7].word7);
            lanes_7_8.write(slot, hdr.block[7].word8);
            lanes_7_9.write(slot, hdr.block[7].word9);
            lanes_7_10.write(slot, hdr.block[7].word10);
            lanes_7_11.write(slot, hdr.block[7].word11);
            lanes_7_12.write(slot, hdr.block[7].word12);
            lanes_7_13.write(slot, hdr.block[7].word13);
            lanes_7_14.write(slot, hdr.block[7].word14);
            lanes_7_15.write(slot, hdr.block[7].word15);
        }
#endif
    }
}
